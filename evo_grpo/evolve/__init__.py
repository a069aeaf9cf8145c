"""Selection, variation and their composition: fitness in, plan and hyperparameters out."""
