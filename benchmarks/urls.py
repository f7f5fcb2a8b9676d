"""No addresses: the benchmarks' processes check their settings and serve nothing."""

urlpatterns: list[object] = []
