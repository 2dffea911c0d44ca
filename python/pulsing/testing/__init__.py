"""A test kit: clusters in memory, a clock that jumps instead of waiting, and faults drawn from one seed.

```python
from pulsing.testing import Network, simulate

@simulate(seeds=20)
async def test_halves_find_each_other(net: Network) -> None:
    a = await net.system("a")
    b = await net.system("b", seeds=["a"])
    net.partition({"a"}, {"b"})
    await net.sleep(60)
    net.heal()
    await net.until(lambda: len(net.members(a)) == len(net.members(b)) == 2, within=30)
```

`docs/guides/testing.md` explains it.
"""

from pulsing.testing._network import Network
from pulsing.testing._simulate import simulate

__all__ = ["Network", "simulate"]
