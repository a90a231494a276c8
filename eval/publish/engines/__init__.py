"""Scripts that decode with an engine in its own environment; they import nothing of Outrider.

`python run_ENGINE.py REQUEST RESULT`: both are JSON files, described in `engine_check.py`.
"""
