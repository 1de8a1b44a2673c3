"""Upgrade an image model: its fine-tune comes to a new base by the best route, with scores on the test split.

python examples/upgrade_images.py --source old-base --finetuned old-base-cars --target new-base --data cars/
python examples/upgrade_images.py   # small models that come with tuneport, in a few minutes on two cores
"""

from stand_ins import arguments, image_models

import tuneport

given, out = arguments(__doc__, image_models, steps=100)
found = tuneport.upgrade(**given)
print(found)  # the decision, and every route
if found.result is not None:
    print("written to", found.save(out))
    print(tuneport.evaluate(out, given["data"], head=given.get("head")))
