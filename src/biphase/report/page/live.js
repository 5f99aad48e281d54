// A watched page reloads itself when it was written again, and stays as it is while nobody serves it.
"use strict";

let served = null;
setInterval(async () => {
  const answer = await fetch(location.pathname, {method: "HEAD", cache: "no-store"}).catch(() => null);
  const now = answer?.ok ? answer.headers.get("ETag") : served;
  if (served && now !== served) location.reload();
  served = now;
}, 2000);
