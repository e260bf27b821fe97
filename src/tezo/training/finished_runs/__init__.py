"""What is done with the result of a run: opened, evaluated, asked, exported, published.

It gives `Run` and `open_tuned`. May import execution and what that may import.
"""
