"""The scheduler hotfix by hand. This folder is all it needs: copy it to any machine, or into a container image.

    python3 hotfix.py status|apply|revert|verify|diff [--site-packages DIR | --venv DIR] [--json]

Without either option: the vLLM that the running python3 would import. ``verify`` runs the behavioural proof with the
interpreter of that environment (CPU only, no weights, no network, under a minute).

Exit codes: 0 done (status: patched and current); 1 failed or not proven; 2 usage; 3 this scheduler is of a shape that
the hooks do not fit; 4 another hotfix is in it; 5 no vLLM there; 6 not needed, vLLM enforces a cap itself; 7 not
writable; 10 status: not patched; 11 status: patched by an older revision.
"""

from __future__ import annotations

import argparse
import difflib
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from patches import patcher
else:
    import patcher  # beside this file, wherever the folder was copied

HERE = Path(__file__).resolve().parent

STATUS_CODES = {
    patcher.PATCHED: 0, patcher.UNSUPPORTED: 3, patcher.FOREIGN_PATCH: 4, patcher.NOT_NEEDED: 6,
    patcher.ORIGINAL: 10, patcher.OLDER: 11,
}  # fmt: skip


def locate(args: argparse.Namespace) -> Path:
    """The site-packages folder to work on. Raises NoVllm."""
    if args.site_packages:
        return Path(args.site_packages).absolute()
    if args.venv:
        return patcher.find_site_packages(Path(args.venv).absolute())
    for entry in map(Path, filter(None, sys.path)):
        if (entry / patcher.SCHED / "scheduler.py").is_file():
            return entry.absolute()
    raise patcher.NoVllm(f"{sys.executable} has no vLLM: name the environment with --venv DIR or --site-packages DIR")


def python_of(site: Path) -> str:
    """DIR/bin/python where ``site`` is DIR/lib/python3.x/site-packages, else the running interpreter."""
    candidate = site.parent.parent.parent / "bin/python"
    return str(candidate) if candidate.exists() else sys.executable


def diff(change: patcher.Change) -> str:
    """A unified diff of the scheduler; the runtime module is only named."""
    parts: list[str] = []
    for path, before, after in change.files:
        if path.endswith(patcher.MODULE):
            parts.append(f"{'remove' if after is None else 'install'} {path}\n")
        else:
            old, new = (before or "").splitlines(True), (after or "").splitlines(True)
            parts += difflib.unified_diff(old, new, path, path)
    return "".join(parts)


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    """Carry out the verb: exit code, report for ``--json``, text for people."""
    site = locate(args)
    installation = patcher.Installation(site, (HERE / patcher.MODULE).read_text(encoding="utf-8"))
    if args.verb == "verify":
        command = [python_of(site), str(HERE / "proof.py"), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd="/")
        if not done.stdout.startswith("{"):
            raise patcher.HotfixError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
        proof = json.loads(done.stdout)
        text = "\n".join(proof["failures"]) or proof["verdict"]
        return done.returncode, proof, text
    if args.verb == "status":
        report = installation.report()
        text = f"{report.status}: vLLM {report.vllm_version} in {site}{report.detail and f' ({report.detail})'}"
        return STATUS_CODES[report.status], report.as_dict(), text
    dry_run = args.verb == "diff" or args.dry_run
    change = installation.revert(dry_run) if args.verb == "revert" else installation.apply(dry_run)
    found = {"changed": change.changed, **change.report.as_dict()}
    if dry_run:
        return 0, {**found, "diff": diff(change)}, diff(change) or "nothing to change"
    return 0, found, f"{change.report.status}{'' if change.changed else ', nothing to change'}: {site}"


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["status", "apply", "revert", "verify", "diff"])
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--site-packages", metavar="DIR", help="folder that holds vllm/")
    where.add_argument("--venv", metavar="DIR", help="virtual environment with vLLM in it")
    parser.add_argument("--dry-run", action="store_true", help="with apply or revert: show what would change")
    parser.add_argument("--json", action="store_true", help="report as JSON")
    args = parser.parse_args()
    try:
        code, report, text = run(args)
    except patcher.HotfixError as error:
        code, text = error.code, str(error)
        report = {"status": getattr(error, "status", "error"), "error": text}
    if args.json:
        text = json.dumps(report, indent=1)
    print(text, file=sys.stdout if args.json or code in (0, 10, 11) else sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
