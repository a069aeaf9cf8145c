class LoRAModelRunnerMixin:
    def reset_lora_state(self):
        """Its presence says that a base with adapters can be loaded again."""
