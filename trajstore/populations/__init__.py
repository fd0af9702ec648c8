"""Named sets of tokens.

``expressions``
    Select tokens by an expression over their coordinates. Expressions are never executed.
``files``
    Populations from the command line: expressions, and files of masks or ids.
``masks``
    Populations of a Dataset: dead, live and all tokens, and every other mask along token.
``named``
    User-defined populations: masks, lists of ids, labels, expressions.
``row_vectors``
    The rows of one parameter in place of the tokens of a run.
"""
