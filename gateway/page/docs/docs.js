"use strict";
// No validator badge: it would ask a server of somebody else's about this one.
SwaggerUIBundle({ url: "/openapi.json", dom_id: "#api", validatorUrl: null, tryItOutEnabled: true });
