"""Detection of the variable that each array of a file holds.

``detect_arrays``
    Kind of each array, from its name, type and shape. Every decision is reported.
``detect_numbers``
    Single numbers of a file: attributes, strings with numbers, arrays of one value.
``kind_table``
    Known kinds of arrays and numbers: common names, dimensions and types.
"""
