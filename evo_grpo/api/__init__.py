"""GRPO, GSPO, CISPO and Population: thin handles on a cohort."""
