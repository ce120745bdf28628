"""HTTP handlers of the Iceberg REST specification, one module per resource.

    request -> http.py (route, body, idempotency key) -> tables.py | namespaces.py | views.py -> catalog/service
                                                                                              -> catalog/planning

Handlers read a request, call one operation, and write its response; they decide nothing about metadata. catalog/app.py
registers their ROUTES and renders errors.
"""
