"""What is made of a finished run: the best adapter with its model card."""
