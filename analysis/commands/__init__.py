"""Commands that analyze runs."""
