"""Recording of any training: from the hooks of a step to a row in the block of a writer.

A row goes down: `step_hooks` take the values of a step, `step_end` completes it, `parameter_rows`
select what the run holds, `device_to_host` copies it to its place in a block.
"""
