"""Recording of any training: from the hooks of a step to a row in the block of a writer.

A row goes down: `listeners` hook a training, `tape_writer` writes what happens on the tape of the
step, `verdict` reads it and completes the row, `parameter_rows` select what the run holds, and
`device_to_host` copies it to its place in a block.
"""
