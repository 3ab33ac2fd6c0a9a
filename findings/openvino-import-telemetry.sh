#!/usr/bin/env bash
# Importing OpenVINO reports the import to its makers, from a process that it starts for this.
#
# Versions: openvino 2026.4.1, openvino-telemetry 2025.2.0 (which pip installs with it).
#
# Source: the opt-in dialogue of the package openvino-telemetry belongs to command-line tools. The
# module `openvino` imports `openvino.tools.ovc`, its converter, whose `__init__` makes a telemetry
# object without a dialogue and sends an event. Without a file that records a refusal, consent
# counts as given.
#
# Input: `import openvino` in a fresh environment and home folder; `send_event` of the installed
# telemetry package is replaced by a function that prints, so that nothing is sent. As a control,
# the same import where the telemetry package is hidden.
#
# Expected: an import of a library for inference does nothing but define names.
#
# Seen: one event, of the category "ov" and the action "import", before the import returns. Where
# the telemetry package cannot be imported, a stub takes its place, and no event is made. In a
# program with threads, such as one that uses JAX, the report also forks the process.
#
# Why it matters: search services of shops and hospitals must not open connections of which nobody
# knows. hypjax hides the telemetry package while it imports OpenVINO.
#
# The script exits with 0 while this is so, and with 1 once it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet openvino==2026.4.1 openvino-telemetry==2025.2.0 numpy==2.4.6

cat >"$work/import.py" <<'PYTHON'
import os
import sys

for name in ("CI", "TF_BUILD", "JENKINS_URL"):  # Telemetry is off in jobs of these.
    os.environ.pop(name, None)
if sys.argv[1] == "hidden":
    sys.modules["openvino_telemetry"] = None
else:
    import openvino_telemetry

    openvino_telemetry.Telemetry.send_event = lambda self, *event, **_: print("event:", *event)
import openvino  # noqa: E402, F401
PYTHON
events() { HOME="$work" "$work/venv/bin/python" "$work/import.py" "$1" 2>/dev/null; }
seen=$(events installed)
hidden=$(events hidden)
echo "with the telemetry package: ${seen:-nothing}"
echo "without it: ${hidden:-nothing}"
if [[ "$seen" != "event: ov import general_import"* || -n "$hidden" ]]; then
  echo "this has changed"
  exit 1
fi
echo "as described: the import makes an event of its own"
