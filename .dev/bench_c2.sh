# Full-size cells. cwd: repository root; $OUT; wheels on PYTHONPATH.
export PYTHONPATH=$PWD:$PYTHONPATH
FAM=${FAM:-qwen35}; TAU=${TAU:-5.70}
python -m benchmarks.full_size make --family $FAM --folder /tmp/full_$FAM 2>&1 | tail -1
timeout 300 python -m benchmarks.decode --folder /tmp/full_$FAM --tau $TAU --batches 1 32 --kernels auto reference --report $OUT/decode_$FAM.json 2> $OUT/decode_$FAM.err
tail -3 $OUT/decode_$FAM.err
XLA_FLAGS=--xla_gpu_enable_command_buffer= timeout 200 python -m benchmarks.decode --folder /tmp/full_$FAM --tau $TAU --batches 1 --kernels auto --profile $OUT/profile_$FAM 2> $OUT/profile_$FAM.err
tail -3 $OUT/profile_$FAM.err
head -70 $OUT/profile_$FAM/*
