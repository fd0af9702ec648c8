"""Results of the analysis as tables, sentences, pages and files."""
