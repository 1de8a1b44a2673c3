"""Images of every format and mode, and images that are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from builders.samples import image_folder, picture, raises
from tuneport.data.formats import read_plain


@pytest.mark.parametrize("suffix", ["png", "jpg", "jpeg", "bmp", "gif", "webp", "tif", "PNG"])
def test_every_image_suffix(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "cat").mkdir()
    picture(100).save(tmp_path / "cat" / f"one.{suffix}")
    image = read_plain(tmp_path, "train").inputs[0]
    assert (image.mode, image.size) == ("RGB", (4, 4))


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1", "LA", "CMYK"])
def test_every_mode_becomes_rgb(tmp_path: Path, mode: str) -> None:
    (tmp_path / "cat").mkdir()
    picture(255, mode="RGB").convert(mode).save(tmp_path / "cat" / ("x.jpg" if mode == "CMYK" else "x.png"))
    image = read_plain(tmp_path, "train").inputs[0]
    assert (image.mode, image.getpixel((0, 0))) == ("RGB", (255, 255, 255))


def test_sixteen_bit_images_are_scaled_and_float_images_refused(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    Image.fromarray(np.full((2, 2), 32768, dtype=np.uint16)).save(tmp_path / "cat" / "a.png")
    Image.fromarray(np.full((2, 2), 0.5, dtype=np.float32)).save(tmp_path / "cat" / "b.tif")
    data = read_plain(tmp_path, "train")
    assert data.inputs[0].getpixel((0, 0)) == (128, 128, 128)
    with raises("b.tif", "pixels are floats"):
        data.inputs[1]


@pytest.mark.parametrize(("dtype", "unit"), [(np.uint8, 1), (np.uint16, 257)])
def test_a_picture_that_is_stored_turned_is_read_upright(tmp_path: Path, dtype: type, unit: int) -> None:
    (tmp_path / "cat").mkdir()
    upright = np.array([[0, 50, 100], [150, 200, 250]], dtype=dtype)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it to the right to see it
    Image.fromarray(np.rot90(upright * unit).copy()).save(tmp_path / "cat" / "a.png", exif=exif)
    found = read_plain(tmp_path, "train").inputs[0]
    assert np.array_equal(np.asarray(found)[..., 0], upright)


def test_decompression_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = read_plain(image_folder(tmp_path / "pets", {"cat": 1}), "train")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4)
    with raises("0.png is too large to open safely", "Resize it."):
        data.inputs[0]
