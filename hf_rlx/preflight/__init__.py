"""What a run needs of the machine, the packages, the tokenizer and the Hub, looked at before it starts.

Trainers ask these functions for problems; `hf_rlx.doctor()` shows everything that they find.
"""
