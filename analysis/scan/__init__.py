"""One pass over the rows of a run.

``array_types``
    Types of NumPy arrays.
``block_tasks``
    Kernels applied to blocks of rows or to single rows, last rows, and the order of tasks.
``consecutive_rows``
    One pass over a block of rows for all measures of the change between rows.
``facts``
    Tables of the variables of a result: their types and attributes.
``flags``
    Values that are categories or have a special meaning, with CF attributes.
``input_checks``
    Checks of the input: a single run, its variables, steps and optimizer.
``lattice_points``
    W on a chosen lattice: values checked against their type, and rounded to another.
``population_statistics``
    Statistics over populations: dead, live and all tokens, and user-defined populations.
``quantity``
    The decorator of a quantity, and the table of all quantities.
``running_state``
    Folds over blocks of rows, with a state that is passed from block to block.
``scan``
    A Dataset prepared for scans: blocks of rows, and the row before each block.
``task_progress``
    Computation with progress reports, on dask's local schedulers and on clusters.
``window``
    Windows of steps: the steps to return, or the only steps to use.
"""
