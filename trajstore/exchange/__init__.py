"""Export and import: from runs to files of other programs, and back."""
