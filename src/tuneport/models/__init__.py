"""Everything that must be known of a model. Public for authors of families: Model with its parts, Family and Head."""

from .base import Family as Family
from .base import Model as Model
from .base import describe_any as describe_any
from .heads import Head as Head
from .parts import Architecture as Architecture
from .parts import Classifier as Classifier
from .parts import Generation as Generation
from .parts import Inputs as Inputs
from .parts import Outputs as Outputs
from .parts import Weights as Weights
