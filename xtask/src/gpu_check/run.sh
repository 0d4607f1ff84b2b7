#!/bin/sh
# Sees what this machine's GPU makes of tollgate:
#   run --out DIR [--quick] [--only PART,...] [--seconds N]
#
# Writes into DIR: device.txt, agree.json (whole models beside the CPU),
# system.txt (a gateway with a worker on the GPU, from a request to the bill),
# speed.json (decoding, prompts, each operation), attribution.json (shares of
# steps beside Shapley values), meter.json (metered time beside the card's own
# view), peer.json (transformers, where it is there),
# sanitizer.txt (compute-sanitizer over a model, where it is there) and
# summary.txt. The exit status is 1 where something did not pass, or did not
# come to its turn. Parts are agree, system, speed, attribution, meter,
# peer, sanitizer, in this order; N seconds at most, 540 unless given.
set -u

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
usage() {
    echo "usage: run --out DIR [--quick] [--only PART,...] [--seconds N]" >&2
    exit 2
}

# What a part gives back that cannot be had here.
not_here=77

# The whole system once: a request over TLS, and what is billed for it.
if [ "${1-}" = --system ]; then
    data=$2
    "$here/tollgate" up --device cuda --data "$data" --listen 127.0.0.1:0 \
        --admin-listen 127.0.0.1:0 >"$data/up.out" 2>"$data/up.err" &
    up=$!
    result=0
    waited=0
    until grep -q '^ready ' "$data/up.out"; do
        sleep 1
        waited=$((waited + 1))
        if [ $waited -gt 60 ] || ! kill -0 $up 2>/dev/null; then
            cat "$data/up.out" "$data/up.err"
            result=1
            break
        fi
    done
    if [ $result = 0 ]; then
        url=$(sed -n 's/^ready \([^ ]*\).*/\1/p' "$data/up.out")
        "$here/tollgate" loadtest --url "$url" --data "$data" --rate 20 --seconds 8 || result=1
    fi
    kill -TERM $up 2>/dev/null
    wait $up || result=1
    [ $result = 0 ] || exit $result
    grep -h '"device"\|worker ready\|calibrated' "$data/up.err"
    "$here/tollgate" ledger check --data "$data" || result=1
    "$here/tollgate" usage --data "$data" || result=1
    exit $result
fi

# One model by our own kernels under a tool: it makes everything many times
# slower, and does not know every machine that has a card.
if [ "${1-}" = --sanitize ]; then
    sanitizer=$(command -v compute-sanitizer ||
        ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1)
    [ -n "$sanitizer" ] || { echo "there is no compute-sanitizer"; exit $not_here; }
    "$sanitizer" --tool "$2" --error-exitcode 9 "$here/gpu_check" agree --quick \
        --case llama/own/overlapping --kernels "$here/kernels" >"$3" 2>&1
    result=$?
    cat "$3"
    grep -q 'Device not supported' "$3" && exit $not_here
    exit $result
fi

out=''
quick=''
only=agree,system,speed,attribution,meter,peer,sanitizer
seconds=540
while [ $# -gt 0 ]; do
    case $1 in
    --out) out=${2:-}; shift 2 || usage ;;
    --only) only=${2:-}; shift 2 || usage ;;
    --seconds) seconds=${2:-}; shift 2 || usage ;;
    --quick) quick=--quick; shift ;;
    *) usage ;;
    esac
done
[ -n "$out" ] && [ -n "$only" ] || usage
for name in $(echo "$only" | tr , ' '); do
    case $name in
    agree | system | speed | attribution | meter | peer | sanitizer) ;;
    *) echo "there is no part $name" >&2; usage ;;
    esac
done
mkdir -p "$out" && out=$(CDPATH='' cd -- "$out" && pwd) || exit 2
end=$(($(date +%s) + seconds))
failed=0
work=$(mktemp -d)
child=''
trap '[ -z "$child" ] || kill -TERM "$child"; rm -rf "$work"' EXIT
trap 'exit 143' TERM INT HUP
: >"$out/summary.txt"

# To the terminal, also from within a part whose output is kept.
exec 3>&2
say() {
    echo "$*" | tee -a "$out/summary.txt" >&3
}

wanted() {
    case ",$only," in *",$1,"*) return 0 ;; esac
    return 1
}

# part NAME SECONDS COMMAND...: runs it for so long at most, and says how it went.
part() {
    name=$1
    began=$(date +%s)
    limit=$(($2 < end - began ? $2 : end - began))
    shift 2
    if [ "$limit" -lt 5 ]; then
        say "$name: NOT RUN, no time is left"
        failed=1
        return
    fi
    timeout -k 5 "$limit" "$@" &
    child=$!
    wait $child
    status=$?
    child=''
    took=$(($(date +%s) - began))
    case $status in
    0) say "$name: passed, $took s" ;;
    "$not_here") say "$name: not run, it cannot be had here" ;;
    124 | 137) say "$name: NOT FINISHED after $took s"; failed=1 ;;
    *) say "$name: FAILED ($status), $took s"; failed=1 ;;
    esac
}

# A Python that has NVIDIA's libraries lends them to ours.
wheels=$(python3 -c 'import glob, sysconfig
print(":".join(glob.glob(sysconfig.get_path("purelib") + "/nvidia/*/lib")))' 2>/dev/null)
if [ -n "$wheels" ]; then
    LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$wheels
    export LD_LIBRARY_PATH
fi

{
    date -u
    uname -srm
    nproc
    command -v nvidia-smi >/dev/null && timeout -k 5 20 nvidia-smi &&
        timeout -k 5 20 nvidia-smi -q | head -120
} >"$out/device.txt" 2>&1

if wanted agree; then
    part agree 150 "$here/gpu_check" agree $quick --kernels "$here/kernels" \
        --out "$out/agree.json" >/dev/null
fi

if wanted system; then
    mkdir "$work/data"
    part system 150 "$here/run" --system "$work/data" >"$out/system.txt" 2>&1
fi

if wanted speed; then
    part speed 200 "$here/gpu_check" speed $quick --kernels "$here/kernels" \
        --out "$out/speed.json" >/dev/null
fi

if wanted attribution; then
    part attribution 150 "$here/gpu_check" attribution $quick --kernels "$here/kernels" \
        --out "$out/attribution.json" >/dev/null
fi

if wanted meter; then
    part meter 75 "$here/gpu_check" meter $quick --kernels "$here/kernels" >"$out/meter.json"
fi

if wanted peer; then
    if command -v python3 >/dev/null; then
        part peer 150 python3 "$here/peer.py" "$out/peer.json" $quick
    else
        say "peer: not run, there is no python3"
    fi
fi

if wanted sanitizer; then
    : >"$out/sanitizer.txt"
    for tool in memcheck racecheck; do
        part "$tool" 75 "$here/run" --sanitize "$tool" "$work/said" >>"$out/sanitizer.txt" 2>&1
    done
fi

{ echo; "$here/gpu_check" table "$out"; } >>"$out/summary.txt" 2>&1 || failed=1
exit $failed
