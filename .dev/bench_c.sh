# cwd: repository root; $OUT; wheels on PYTHONPATH. About 240 s.
export PYTHONPATH=$PWD:$PYTHONPATH
set -x
t0=$SECONDS
timeout 100 python -m benchmarks.kernels parity > $OUT/parity.txt 2> $OUT/parity.err; echo "parity rc $?"
cat $OUT/parity.txt; tail -3 $OUT/parity.err
echo "== $((SECONDS-t0)) s"
timeout 170 python -m benchmarks.kernels time --batches 1 32 8 --context 1024 --report $OUT/kernels.json > $OUT/time.txt 2> $OUT/time.err; echo "time rc $?"
tail -3 $OUT/time.err
python - <<'P'
import json,os
r=json.load(open(os.environ["OUT"]+"/kernels.json"))
for x in r: print(x["batch"],x["case"],x["tile"],x.get("us"),x.get("TB_s"),x.get("failed","")[:60])
P
echo "== $((SECONDS-t0)) s"
