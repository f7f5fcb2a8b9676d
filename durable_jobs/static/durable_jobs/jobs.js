// What the pages can do without this script, they do. It refreshes the part of a job's page that changes,
// sends a bulk's next part by itself, ticks a page's jobs at once, and copies.
"use strict";

(() => {
    const REFRESH = 3000;

    function refreshing(region) {
        let timer = null;

        function moves() {
            return region.querySelector("[data-jobs-state='moving']") !== null;
        }

        function later() {
            clearTimeout(timer);
            if (!document.hidden) timer = setTimeout(refresh, REFRESH);
        }

        async function refresh() {
            try {
                const answer = await fetch(region.dataset.jobsLive, {
                    credentials: "same-origin",
                    headers: { "X-Requested-With": "XMLHttpRequest" },
                    redirect: "error",
                });
                if (answer.status === 404 || answer.status === 403) return;
                if (answer.ok) show(await answer.text());
            } catch {
                // The network or the session; the next look tells.
            }
            if (moves()) later();
            else location.reload();
        }

        function show(html) {
            const focused = region.contains(document.activeElement) ? document.activeElement.id : "";
            const read = new DOMParser().parseFromString(html, "text/html");
            region.replaceChildren(...read.body.childNodes);
            if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
        }

        document.addEventListener("visibilitychange", () => {
            clearTimeout(timer);
            if (!document.hidden && moves()) refresh();
        });
        if (moves()) later();
    }

    document.querySelectorAll("[data-jobs-live]").forEach(refreshing);

    document.querySelectorAll("form[data-jobs-continue]").forEach((form) => {
        setTimeout(() => form.requestSubmit(), 600);
    });

    document.querySelectorAll("[data-jobs-tick]").forEach((all) => {
        all.hidden = false;
        all.addEventListener("change", () => {
            all.form.querySelectorAll("input[name='ids']").forEach((one) => { one.checked = all.checked; });
        });
    });

    if (navigator.clipboard) {
        document.querySelectorAll("[data-jobs-copy]").forEach((button) => {
            button.hidden = false;
            button.addEventListener("click", () => {
                navigator.clipboard.writeText(document.getElementById(button.dataset.jobsCopy).textContent);
            });
        });
    }
})();
