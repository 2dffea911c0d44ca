"""A Ray job whose processes call each other through Pulsing: python examples/ray_job.py (needs pulsing[ray])."""

import ray

import pulsing as pul


@pul.remote
class Shard:
    """Lives inside a Ray actor, and is called past Ray."""

    def __init__(self, number: int) -> None:
        self.number = number

    async def squares(self, upto: int):
        for n in range(upto):
            yield self.number, n * n


@ray.remote
class Holder:
    async def serve(self, number: int) -> str:
        system = await pul.init_inside_ray()
        await Shard.spawn(number, name=f"shard/{number}")
        return system.addr


ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
holders = [Holder.remote() for _ in range(2)]
ray.get([holder.serve.remote(number) for number, holder in enumerate(holders)])

with pul.sync.init_inside_ray(expected=3):
    for number in range(2):
        shard = pul.sync.resolve(f"shard/{number}", cls=Shard, timeout=30)
        print(list(shard.squares(3)))
ray.shutdown()
