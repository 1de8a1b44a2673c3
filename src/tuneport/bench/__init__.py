"""The paper's tables and figures, from recipes. Needs the packages of the extra `bench`."""

from importlib.util import find_spec

from ..errors import TuneportError

if missing := [name for name in ("pydantic",) if find_spec(name) is None]:
    raise TuneportError(f'tuneport bench needs {" and ".join(missing)}. Run: pip install "tuneport[bench]".')
