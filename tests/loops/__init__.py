"""Small training loops of every kind, recorded beside plain lists, and their judge."""
