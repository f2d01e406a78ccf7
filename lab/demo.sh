#!/usr/bin/env bash
# The demo: two simulated Sparks, from nothing to a streamed token. Safe to repeat; a second run changes nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
started=$SECONDS

say() { printf '\n== %s (%d s)\n' "$1" $((SECONDS - started)); }

# Before anything is installed: Linux, root, and what cannot be installed here.
python3 lab/lab.py check

say "tools"
make --no-print-directory tools
PATH="$PWD/.cache/venv/bin:$PATH"

say "two simulated Sparks"
python3 lab/lab.py up

say "the unchanged site.yml against inventory/lab"
ansible-playbook -i inventory/lab site.yml

say "a streamed completion, asked on the head"
python3 lab/lab.py ssh spark-a python3 - < module_utils/sparkpair/completion.py

cat <<'TEXT'

Look around:
  make status                                          the table of both nodes
  python3 lab/lab.py ssh spark-a                       log in to a node (also spark-b)
  python3 lab/lab.py ssh spark-a journalctl -fu sparkpair-rank
  ansible-playbook playbooks/stop.yml                  stop the pair (with .cache/venv/bin in PATH); restart.yml starts it
  make lab-down                                        remove the lab
TEXT
printf 'demo: done in %d s\n' $((SECONDS - started))
