#!/usr/bin/env bash
# Everything that wants checking on a GPU, in under 8 minutes:
#
#   benchmarks/gpu_check.sh [--small] [OUT]
#
# OUT (runs/gpu_check) gets a log and a JSON file of every part and summary.txt.
# Each part has its own time limit, one that fails does not stop the others, and
# the exit code is 0 if all passed. --small is a dry run on a CPU: everything
# tiny, the kernel interpreted. PYTHON names the interpreter (.venv/bin/python if
# there is one), BATCH the sequences of the 0.6B step (4: about 30 GB, most of it
# three training states).
set -u

usage() {
  echo "error: $1; usage: benchmarks/gpu_check.sh [--small] [OUT]" >&2
  exit 2
}

small=
out=
for argument; do
  case $argument in
    --small) small=yes ;;
    -*) usage "unknown option $argument" ;;
    *)
      [ -z "$out" ] || usage "two output folders, $out and $argument"
      out=$(mkdir -p "$argument" && cd "$argument" && pwd) ||
        usage "cannot make $argument"
      ;;
  esac
done
cd "$(dirname "$0")/.." || exit 2
[ -n "$out" ] || { mkdir -p runs/gpu_check && out=$PWD/runs/gpu_check; } || exit 2
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
summary=$out/summary.txt
rm -f "$out"/{summary.txt,parity.*,speed.*,steps.*,tokens.*}

if [ -n "$small" ]; then
  export JAX_PLATFORMS=cpu
  export XLA_FLAGS="${XLA_FLAGS:-} --xla_backend_optimization_level=0"
fi
device=$("$python" -c 'import jax
x = jax.devices()[0]
print(jax.default_backend(), x.device_kind, "jax", jax.__version__)')
case $device in
  gpu*) ;;
  cpu*) [ -n "$small" ] || usage "JAX finds no GPU; --small is a dry run" ;;
  *) usage "no GPU: '$device'" ;;
esac
echo "$device, $(git describe --always --dirty 2>/dev/null)" | tee "$summary"

failed=0
# part NAME SECONDS SCRIPT OPTIONS...
part() {
  local name=$1 limit=$2 begin=$SECONDS code verdict
  shift 2
  echo "== $name, at most $limit s: $*"
  timeout -k 5 "$limit" "$python" "benchmarks/$1.py" "${@:2}" \
    --json "$out/$name.json" 2>&1 | tee "$out/$name.log"
  code=${PIPESTATUS[0]}
  case $code in
    0) verdict=passed ;;
    124 | 137) verdict="OUT OF TIME" ;;
    *) verdict="FAILED ($code)" ;;
  esac
  [ "$code" = 0 ] || failed=1
  printf '%-8s %-12s %4d s\n' "$name" "$verdict" $((SECONDS - begin)) \
    >>"$summary"
}

# parity: the kernel beside float64 on the CPU, and the same bits twice.
# speed: bandwidth of the kernel, of a copy, and of XLA.
# steps: a training step of every variant, beside XLA.
# tokens: tokens per second at 0.6B.
if [ -n "$small" ]; then
  part parity 300 kernel_parity --small --implementation interpret_triton
  part speed 300 depth_attention --slots 2 9 --widths 128 \
    --sequence-lengths 256
  part steps 300 variant_steps --variants standard rd_delta_block --layers 2 \
    --width 32
  part tokens 300 step_time --variants delta --width 32 --layers 2 \
    --sequence-length 16 --batch-size 2 --num-blocks 2 --rounds 2
else
  part parity 120 kernel_parity --implementation pallas_triton
  part speed 80 depth_attention --implementation pallas_triton --slots 9 33
  # Tiny products need no tuning.
  XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_autotune_level=0" \
    part steps 110 variant_steps --implementation pallas_triton
  part tokens 140 step_time --preset qwen3-0.6b --variants delta_block delta \
    --dtype bfloat16 --remat full --batch-size "${BATCH:-4}" \
    --sequence-length 2048 --rounds 6
fi

for name in parity speed steps tokens; do
  printf '\n== %s\n' "$name"
  tail -n 40 "$out/$name.log"
done >>"$summary"
cat "$summary"
exit $failed
