"""Which array of a file holds which variable.

``detect_arrays``
    What each array of a file is taken for: by its name, its type and its shape; never silently.
``detect_numbers``
    Numbers beside the arrays of a file: attributes, texts that are numbers, arrays of one value.
``kind_table``
    The kinds of arrays and numbers that are known: the names in use, dimensions and types.
"""
