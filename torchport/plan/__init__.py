"""A job's plan without a TPU: whether it fits on a slice, and how long a step should take.

What is in here compiles stages for a TPU that is not there, and models their time.
"""
