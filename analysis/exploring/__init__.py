"""A page that explores a run in a browser (the extra `explore`)."""
