"""Records and compares the inputs of a run: its settings, the files it reads, and the software.

A run folder records the inputs when the run begins. A resume compares them with the present ones,
and refuses a change or records it. Commands beside a finished run compare and record nothing.
"""
