"""The main job on the two models that the package carries."""
