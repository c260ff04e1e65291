"""The command `hf-rlx`.

A command is a module of this package, `<name with _ for ->.py`, with two functions:

    add_arguments(parser)   adds what the command takes to an `argparse.ArgumentParser`
    run(args) -> int        does it; the value is the exit status

It is imported only when its command is named, and imports torch only inside these functions: `hf-rlx --help` is quick.

Exit status: 0 done, 1 an error (one line on stderr), 2 a wrong command line or configuration file, 130 and 143 stopped
by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import linecache
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

COMMANDS: dict[str, str] = {
    "sft": "supervised fine-tuning on demonstrations",
    "reward": "a reward model from pairs or ranked answers",
    "prm": "a process reward model from solutions with a label a step",
    "grpo": "GRPO, DAPO, Dr. GRPO, GSPO or RLOO against verifiers or a reward model",
    "ppo": "PPO with a critic on the policy's base, against verifiers or a reward model",
    "dpo": "direct preference optimisation on pairs",
    "ipo": "IPO on pairs",
    "simpo": "SimPO on pairs, without a reference",
    "orpo": "ORPO on pairs, without a reference",
    "iterative-dpo": "rounds of sampling, scoring, pairing, and DPO on the pairs",
    "pipeline": "SFT, a reward model and PPO one after another on one base, in about a minute",
    "demo": "train the bundled model with GRPO and a verifier, in about a minute",
    "pairs": "preference pairs from rankings, ratings, outcomes, judges or pairs, with a report",
    "doctor": "look at machine, packages, model, data, rewards and Hub before a run",
    "verify": "run a verifier over answers whose right verdict is known",
    "push": "a saved model with its roles, or preference data, to the Hub",
    "card": "write the model card of a saved run, from what lies in its folder",
    "estimate": "the memory that a run takes, part by part, and what to change where it does not fit",
    "merge": "merge a saved adapter into its base: a plain transformers model",
    "eval": "held-out accuracy of a model or an adapter, with its interval",
}
"""Every command, with one line of help."""


class UsageError(ValueError):
    """A wrong command line or configuration file: the message goes to stderr below the usage, exit status 2."""


def module_of(name: str) -> ModuleType:
    """The module of a command.

    Args:
        name: one of `COMMANDS`.
    """
    return importlib.import_module(f"hf_rlx.cli.{name.replace('-', '_')}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: words of the command line after `hf-rlx`; None: those of the process.

    Returns:
        the exit status.

    Raises:
        SystemExit: of a wrong command line (2), and after `--help` and `--version` (0).
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None and not sys.stderr.isatty():
        # A bar fills a log file; the libraries read these when they are imported.
        os.environ.setdefault("TQDM_DISABLE", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    name = _command_of(words)
    module = module_of(name)
    parser = argparse.ArgumentParser(prog=f"hf-rlx {name}", description=COMMANDS[name], allow_abbrev=False)
    try:
        module.add_arguments(parser)
        args, unknown = parser.parse_known_args(_hyphenated(words[1:], parser))
        if unknown:
            raise UsageError(_unknown(unknown[0], parser))
        args.words = words[1:]  # for messages that show the command again
        status: int = module.run(args)
        sys.stdout.flush()  # a closed pipe shows here and not after the end
    except UsageError as error:
        parser.error(str(error))
    except BrokenPipeError:
        # `hf-rlx verify ... | head`: whoever read has had enough. Nothing more can be said there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except KeyboardInterrupt:
        print(f"hf-rlx {name}: stopped by Ctrl-C", file=sys.stderr)
        return 130
    except Exception as error:
        if not _meant_for_users(error):
            raise
        print(f"hf-rlx {name}: error: {told(error)}", file=sys.stderr)
        return 1
    return status


def told(error: Exception) -> str:
    """An error's message, for people: of the system's errors without their number."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        if isinstance(error, FileNotFoundError):
            return f"there is no file or folder {os.fspath(error.filename)}"
        return f"{os.fspath(error.filename)}: {error.strerror}"
    return str(error) or type(error).__name__


def _command_of(words: list[str]) -> str:
    """The command that is asked for; ends with the overview where none is."""
    parser = argparse.ArgumentParser(
        prog="hf-rlx",
        usage="hf-rlx COMMAND ...",
        description="Reinforcement learning for language models on one small GPU, a free notebook, or a CPU.",
        epilog="commands:\n" + "\n".join(f"  {name:<15} {text}" for name, text in COMMANDS.items()) + "\n\n"
        "hf-rlx COMMAND --help says what a command takes. exit status: 0 done; 1 an error, one line on stderr;\n"
        "2 a wrong command line or configuration file; 130 and 143 stopped by Ctrl-C and SIGTERM.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_version())
    parser.add_argument("command", nargs="?", metavar="COMMAND", help=argparse.SUPPRESS)
    if words and words[0] in COMMANDS:
        return words[0]
    name = parser.parse_args(words[:1]).command
    if name is None:
        parser.error("a command is missing; hf-rlx --help lists them")
    near = difflib.get_close_matches(name, COMMANDS, 1)
    hint = f"; did you mean {near[0]!r}?" if near else "; hf-rlx --help lists the commands"
    parser.error(f"invalid choice: {name!r}{hint}")


def _version() -> str:
    import hf_rlx

    return f"hf-rlx {hf_rlx.__version__}"


def _hyphenated(words: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """`--num_generations 8` as `--num-generations 8`, where the parser knows only that."""
    known = parser._option_string_actions
    result = []
    for word in words:
        option, equals, value = word.partition("=")
        other = option.replace("_", "-")
        fits = option.startswith("--") and option not in known and other in known
        result.append(other + equals + value if fits else word)
    return result


def _unknown(word: str, parser: argparse.ArgumentParser) -> str:
    """What to say of a word that the parser does not know."""
    option = word.partition("=")[0].replace("_", "-")
    if not option.startswith("--"):
        return f"unexpected {word!r}"
    from hf_rlx.trainers.removed_fields import replacement

    field = option[2:].replace("-", "_")
    if (instead := replacement(field, {action.dest for action in parser._actions})) is not None:
        return f"there is no flag {option}; use {instead}"
    names = [name for name, action in parser._option_string_actions.items() if action.help != argparse.SUPPRESS]
    near = difflib.get_close_matches(option, names, 1)
    return f"unknown flag {word.partition('=')[0]}" + (f"; did you mean {near[0]}?" if near else "")


def _meant_for_users(error: Exception) -> bool:
    """Whether an error was raised on purpose, with a message for people; otherwise the traceback is wanted.

    A `ValueError` out of `a, b = c` or `int(x)` is a fault of the program, and so is a `RuntimeError` or `TypeError`
    that hf_rlx has not raised itself.
    """
    if isinstance(error, OSError | ImportError | UnicodeError):
        return True
    if type(error).__name__ == "OutOfMemoryError":  # torch's
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    file = trace.tb_frame.f_code.co_filename
    line = linecache.getline(file, trace.tb_lineno).strip()
    on_purpose = not line or line.startswith("raise ")
    if isinstance(error, ValueError):
        return on_purpose
    ours = Path(file).is_relative_to(Path(__file__).resolve().parents[1])
    return ours and on_purpose and isinstance(error, RuntimeError | TypeError | ArithmeticError)
