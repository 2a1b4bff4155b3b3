"""Several processes as one: who we are, meshes, what all must agree on. Knows nothing of the model."""
