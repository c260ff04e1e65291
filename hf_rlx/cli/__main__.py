"""`python -m hf_rlx.cli`."""

from hf_rlx.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
