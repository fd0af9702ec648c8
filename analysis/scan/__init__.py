"""One pass over the rows of a run.

``block_tasks``
    Tasks about the blocks of an array: of whole vectors, of last rows, and in what order.
``consecutive_rows``
    One pass over a block of rows for everything that is asked about the way between rows.
``flags``
    Values that are categories, or stand for no number, with CF's attributes.
``input_checks``
    What every question checks first: one run, what it holds, its steps and its optimizer.
``lattice_points``
    W on a lattice of choice: its values checked against their type, and rounded to another.
``population_statistics``
    Dead, live and all tokens, populations of the user, and the statistics of anything over them.
``quantity``
    The decorator of a quantity, and the table of all of them.
``running_state``
    A state that is carried from each block of rows to the next: sums over any number of rows.
``scan``
    A Dataset prepared for scans: blocks of rows, and the last row of the block before each.
``task_progress``
    Computing, and telling how far it is: on dask's local schedulers, and on clusters.
``window``
    Windows of steps: what of a run is shown, or all that is looked at.
"""
