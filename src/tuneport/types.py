"""How work that takes long says how far it is: callbacks that it calls, and that whoever starts it gives."""

from collections.abc import Callable

Progress = Callable[[int], None]  # so many more samples, or steps, are done
Stage = Callable[[str, int, int], None]  # the name of a stage, what is done of it, and what there is to do
