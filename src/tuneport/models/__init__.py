"""Everything that must be known of a model. Public for authors of families: Model with its parts, Family and Head."""

from .base import Architecture as Architecture
from .base import Classifier as Classifier
from .base import Family as Family
from .base import Generation as Generation
from .base import Inputs as Inputs
from .base import Model as Model
from .base import Outputs as Outputs
from .base import Weights as Weights
from .base import describe_any as describe_any
from .heads import Head as Head
