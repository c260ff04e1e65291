"""Floor 3: one file per algorithm, its configuration and its trainer together.

base, online (the loop that samples), grpo; config and online_config (the fields they share); differences (where we
differ from TRL, and why). Import the public names from `hf_rlx`.
"""
