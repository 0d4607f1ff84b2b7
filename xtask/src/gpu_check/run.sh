#!/bin/sh
# Sees what this machine's GPU makes of tollgate: run --out DIR [--quick]
#
# Writes into DIR: device.txt, agree.json (whole models beside the CPU),
# sanitizer.txt (compute-sanitizer over the same, where there is one),
# meter.json (metered time beside the card's own view), system.txt (a gateway
# with a worker on the GPU, from a request to the bill), speed.json (decoding,
# prompts, each operation), peer.json (transformers, where it is there) and
# summary.txt. The exit status is 1 where something that ran did not pass.
# Ten minutes at most.
set -u

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
out=''
quick=''
while [ $# -gt 0 ]; do
    case $1 in
    --out) out=${2:?--out wants a folder}; shift 2 ;;
    --quick) quick=--quick; shift ;;
    *) echo "usage: run --out DIR [--quick]" >&2; exit 2 ;;
    esac
done
[ -n "$out" ] || { echo "usage: run --out DIR [--quick]" >&2; exit 2; }
mkdir -p "$out" && out=$(CDPATH='' cd -- "$out" && pwd)
failed=0
: >"$out/summary.txt"
: >"$out/sanitizer.txt"

say() {
    echo "$*" | tee -a "$out/summary.txt"
}

# judge NAME STATUS BEGAN
judge() {
    seconds=$(($(date +%s) - $3))
    if [ "$2" = 0 ]; then
        say "$1: passed, $seconds s" >&2
    elif [ "$2" = 124 ]; then
        say "$1: NOT FINISHED after $seconds s" >&2
        failed=1
    else
        say "$1: FAILED ($2), $seconds s" >&2
        failed=1
    fi
}

# part NAME SECONDS COMMAND...: runs it for so long at most.
part() {
    name=$1
    limit=$2
    shift 2
    began=$(date +%s)
    timeout "$limit" "$@"
    judge "$name" $? "$began"
}

{
    date -u
    uname -srm
    nproc
    command -v nvidia-smi >/dev/null && nvidia-smi && nvidia-smi -q | head -120
} >"$out/device.txt" 2>&1

part agree 90 "$here/gpu_check" agree $quick --kernels "$here/kernels" \
    >"$out/agree.json" 2>"$out/.agree.err"
cat "$out/.agree.err" >&2

sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1)
for tool in memcheck racecheck; do
    if [ -n "$sanitizer" ]; then
        part "$tool" 45 "$sanitizer" --tool "$tool" --error-exitcode 9 \
            "$here/gpu_check" agree --quick --kernels "$here/kernels" >>"$out/sanitizer.txt" 2>&1
    else
        say "$tool: not run, there is no compute-sanitizer" >>"$out/sanitizer.txt"
    fi
done

part meter 60 "$here/gpu_check" meter $quick --kernels "$here/kernels" \
    >"$out/meter.json" 2>"$out/.meter.err"
cat "$out/.meter.err" >&2

# The whole system once: a request over TLS, and what is billed for it.
whole() {
    data=$(mktemp -d)
    "$here/tollgate" up --device cuda --data "$data" --listen 127.0.0.1:0 \
        --admin-listen 127.0.0.1:0 >"$data/up.out" 2>"$data/up.err" &
    up=$!
    waited=0
    until grep -q '^ready ' "$data/up.out"; do
        sleep 1
        waited=$((waited + 1))
        if [ $waited -gt 40 ] || ! kill -0 $up 2>/dev/null; then
            cat "$data/up.out" "$data/up.err"
            return 1
        fi
    done
    url=$(sed -n 's/^ready \([^ ]*\).*/\1/p' "$data/up.out")
    result=0
    "$here/tollgate" loadtest --url "$url" --data "$data" --rate 20 --seconds 8 || result=1
    kill -TERM $up
    wait $up || result=1
    grep -h '"device"\|worker ready\|calibrated' "$data/up.err"
    "$here/tollgate" ledger check --data "$data" || result=1
    "$here/tollgate" usage --data "$data" || result=1
    rm -rf "$data"
    return $result
}
began=$(date +%s)
whole >"$out/system.txt" 2>&1
judge system $? "$began"

part speed 170 "$here/gpu_check" speed $quick --kernels "$here/kernels" \
    --out "$out/speed.json" >/dev/null 2>"$out/.speed.err"
cat "$out/.speed.err" >&2

if python3 -c 'import torch, transformers' 2>/dev/null; then
    part peer 110 python3 "$here/peer.py" $quick >"$out/peer.json"
else
    say "peer: not run, there is no transformers" >"$out/peer.json"
fi
{ echo; "$here/gpu_check" table "$out"; } >>"$out/summary.txt" 2>&1 || failed=1
rm -f "$out/.agree.err" "$out/.meter.err" "$out/.speed.err"
exit $failed
