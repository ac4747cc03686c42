#!/usr/bin/env bash
# The regression gate for any CI: launches, check, pages.
#
#     scripts/check_regressions.sh CONFIG HISTORY OUT [OPTION...]
#
# Further options go to mokbench check, such as --strict or --floor 3%.
# LAUNCHES (3): launches of CONFIG. BASELINE_PYTHON: python of an environment that has the base, to
# confirm suspects by runs in turn; BASELINE_COMMIT: what that base is (mokbench check --good-commit
# prints the one to take), without which a confirmation clears no launch to become base.
# RECORD=yes: append to HISTORY; leave it out for pull requests.
# MOKBENCH (mokbench): the command; MOKBENCH_COMMIT: what was measured, for the history.
# The exit code is that of mokbench check, see docs/regression.md.
set -euo pipefail
if [ $# -lt 3 ]; then
    sed -n '2,12p' "$0" >&2
    exit 2
fi
config=$1 history=$2 out=$3
shift 3
mokbench=${MOKBENCH:-mokbench}
mkdir -p "$out"

for number in $(seq "${LAUNCHES:-3}"); do
    code=0
    $mokbench run "$config" --out "$out/launch-$number" --no-charts --quiet || code=$?
    # 3: some rows failed. The check names them, and the other rows are still judged.
    if [ "$code" -ne 0 ] && [ "$code" -ne 3 ]; then
        exit "$code"
    fi
done

options=(--history "$history" --junit "$out/junit.xml" --comment "$out/comment.md")
options+=(--summary "${GITHUB_STEP_SUMMARY:-$out/summary.md}")
if [ -n "${BASELINE_PYTHON:-}" ]; then
    options+=(--confirm --baseline-python "$BASELINE_PYTHON" --config "$config")
    if [ -n "${BASELINE_COMMIT:-}" ]; then
        options+=(--baseline-commit "$BASELINE_COMMIT")
    fi
fi
if [ "${RECORD:-no}" = yes ]; then
    options+=(--record)
fi
code=0
$mokbench check "$out"/launch-* "${options[@]}" "$@" || code=$?

# A page that cannot be drawn must not hide what the check found.
$mokbench report "$out/launch-1" --format html > "$out/report.html" || {
    echo "warning: no report.html" >&2
    rm -f "$out/report.html"
}
if [ -d "$history" ]; then
    $mokbench report --history "$history" --format html > "$out/history.html" || {
        echo "warning: no history.html" >&2
        rm -f "$out/history.html"
    }
fi
exit "$code"
