"""The paper's tables and figures on top of tuneport: recipes, data layouts, fine-tuning protocol and diagnostics.

Run `python -m paper` from the root of the repository. Importing the package adds the layouts of the paper's data sets
to those that `TASK:PATH` knows, and the samplers of its study.
"""

from . import layouts as layouts
from . import samplers as samplers
