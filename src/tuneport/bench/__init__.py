"""The paper's tables and figures, from recipes. Needs the packages of the extra `bench`."""

from importlib.util import find_spec

from ..errors import TuneportError


def require(package: str) -> None:
    """Raise an error that says how to install a package of the extra, if it is missing."""
    if find_spec(package) is None:
        raise TuneportError(f'tuneport bench needs {package}. Run: pip install "tuneport[bench]".')


require("pydantic")
