"""A worker process without torch, run by path: the real loop around a simulated model.

Settings come as usual; the environment variable FAKE_WORKER makes it misbehave.
"""

import os
import sys
import time

from ksana.devices.backend import Runner, WorkerInfo, WorkerSettings
from ksana.devices.simulated_worker import SimulatedWorker, hashed_tokens
from ksana.devices.staging import StagingMemory
from ksana.devices.worker import Progress, main
from ksana.errors import ModelLoadError
from ksana.messages.staging import CopyFromStaging, CopyToStaging, StagingCopied
from ksana.messages.steps import StepDone, StepPlan

MODE = os.environ.get("FAKE_WORKER", "")


class SlowRunner:
    def __init__(self, inner: SimulatedWorker, step_s: float) -> None:
        self._inner = inner
        self._step_s = step_s

    def run(self, plan: StepPlan) -> StepDone:
        print(f"step {plan.step_id} on stdout")
        if MODE == "raise":
            raise RuntimeError("a step that fails")
        time.sleep(self._step_s)
        return self._inner.run(plan)

    def copy_staged(self, order: CopyFromStaging | CopyToStaging) -> StagingCopied:
        return self._inner.copy_staged(order)


def build(settings: WorkerSettings, fingerprint: str, progress: Progress) -> tuple[Runner, WorkerInfo]:
    if MODE == "slow_start":
        time.sleep(60)
    if MODE == "bad_model":
        raise ModelLoadError("weights.safetensors: tensor x is missing")
    if MODE == "bug":
        raise ValueError("a bug in loading")
    progress(1, 2)
    progress(2, 2)
    worker = SimulatedWorker(
        hashed_tokens(1000),
        block_size=settings.block_size,
        num_fa_blocks=settings.num_fa_blocks,
        num_swa_blocks=settings.num_swa_blocks,
        sliding_window=64 if settings.num_swa_blocks else None,
        staging=None if settings.staging is None else StagingMemory.attach(settings.staging),
    )
    step_s = float(os.environ.get("FAKE_WORKER_STEP_S", "0"))
    return SlowRunner(worker, step_s), WorkerInfo(device=f"fake {fingerprint}")


if __name__ == "__main__":
    if MODE == "garbage":
        os.write(int(sys.argv[1]), b"\xff" * 100)
        time.sleep(60)
    sys.exit(main(build))
