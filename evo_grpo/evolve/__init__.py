"""Selection, variation and their composition: fitness in, a plan and new hyperparameters out; no torch."""
