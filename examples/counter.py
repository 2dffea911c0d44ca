"""An actor, a name, two calls."""

import asyncio

import pulsing as pul


@pul.remote
class Counter:
    def __init__(self) -> None:
        self.value = 0

    def add(self, n: int) -> int:
        self.value += n
        return self.value


async def main() -> None:
    await pul.init()
    counter = await Counter.spawn(name="counter")
    print(await counter.add(2))
    # Any node of the cluster finds it by its name.
    again = await pul.resolve("counter")
    print(await again.add(3))
    await pul.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
