"use strict";
for (const svg of document.querySelectorAll("svg[data-plot]")) {
  const plot = JSON.parse(svg.dataset.plot), last = plot.labels.length - 1;
  const cursor = svg.querySelector(".cursor"), out = svg.closest("figure").querySelector("output");
  let at = -1;
  const show = (index) => {
    at = Math.min(Math.max(index, 0), last);
    const x = plot.places[at];
    cursor.setAttribute("x1", x); cursor.setAttribute("x2", x); cursor.removeAttribute("hidden");
    const values = Object.entries(plot.lines).map(([name, line]) => name + " " + (line[at] ?? "–"));
    out.textContent = plot.labels[at] + ": " + values.join(", ");
  };
  const point = (event) => {
    const box = svg.getBoundingClientRect(), x = 100 * (event.clientX - box.left) / box.width;
    const far = plot.places.map((place) => Math.abs(place - x));
    show(far.indexOf(Math.min(...far)));
  };
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("keydown", (event) => {
    const to = {ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last}[event.key];
    if (to !== undefined) { show(to); event.preventDefault(); }
  });
}
