"""Ask the installed vLLM whether it takes these options: python - ENGINE.yaml MODEL ARGUMENT...; it starts nothing.

Its own parser refuses unknown options and wrong values, its own configuration refuses options that exclude each other
or this version. Prints one line and exits 1 for a refusal; exits 0 when all is well.
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path


def refusal(options: str, model: str, topology: list[str]) -> str:
    """What vLLM says against the options, in one line; empty when it takes them."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm")
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser")).set_defaults()
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            arguments = parser.parse_args(["serve", model, "--config", options, *topology])
    except SystemExit:
        return next(
            (line for line in reversed(said.getvalue().splitlines()) if "error" in line), said.getvalue()[-300:]
        )
    arguments.model = getattr(arguments, "model_tag", None) or model
    try:
        ServeSubcommand().validate(arguments)
        if Path(model).is_dir():
            AsyncEngineArgs.from_cli_args(arguments).create_engine_config()
    except Exception as error:  # whatever it raises is its refusal
        return f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
    return ""


if __name__ == "__main__":
    text = refusal(sys.argv[1], sys.argv[2], sys.argv[3:])
    if text:
        print(text)
        sys.exit(1)
