"""The style sheet of the page: light and dark by the reader's preference, from a phone to a desktop."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --panel: #f7f8fa; --ink: #16191d; --ink2: #5b636e; --rule: #dfe3e8; --grid: #eaedf1;
  --accent: #0f6d43; --accent-paper: #e7f4ed; --bar: #8aa4c8;
  --k0: #777e88; --k1: #1667c7; --k2: #c24a0c; --k3: #14803c; --k4: #8a35d6; --k5: #97690a; --k6: #0d7a8c;
  --k7: #c02169;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171b; --panel: #1b1f25; --ink: #e8eaed; --ink2: #a0a8b3; --rule: #333a44; --grid: #262c34;
    --accent: #5ad19a; --accent-paper: #173325; --bar: #52719c;
    --k0: #98a0ab; --k1: #62a8ff; --k2: #ff9350; --k3: #4fd07c; --k4: #c58bff; --k5: #e3bb4c; --k6: #3fcfe3;
    --k7: #ff79b1;
  }
}
.k0 { --k: var(--k0) } .k1 { --k: var(--k1) } .k2 { --k: var(--k2) } .k3 { --k: var(--k3) }
.k4 { --k: var(--k4) } .k5 { --k: var(--k5) } .k6 { --k: var(--k6) } .k7 { --k: var(--k7) }
* { box-sizing: border-box }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
  font-variant-numeric: tabular-nums; -webkit-text-size-adjust: 100%;
}
main { max-width: 1000px; margin: 0 auto; padding: 40px 24px 64px }
h1 { font-size: 30px; line-height: 1.2; margin: 4px 0 12px; overflow-wrap: anywhere; letter-spacing: -0.01em }
h2 { font-size: 20px; margin: 52px 0 6px; letter-spacing: -0.005em }
h3 { font-size: 15px; margin: 24px 0 2px; overflow-wrap: anywhere }
p { margin: 0 0 12px; max-width: 72ch; overflow-wrap: anywhere }
.eyebrow { font-size: 13px; font-weight: 600; color: var(--accent); margin: 0 }
.eyebrow.none { color: var(--k2) }
.lead { font-size: 17px }
.note { color: var(--ink2); font-size: 14px }
.warning { border-left: 3px solid var(--k2); padding: 2px 0 2px 12px; font-size: 14px }
.card {
  border: 1px solid var(--rule); border-left: 3px solid var(--k2); border-radius: 8px;
  margin: 20px 0 8px; padding: 12px 16px; background: var(--panel);
}
.card p { margin: 0 0 4px; font-size: 15px }
code { font: 0.93em ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace }
.tiles {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 1px; margin: 24px 0 8px;
  background: var(--rule); border: 1px solid var(--rule); border-radius: 8px; overflow: hidden;
}
.tile { background: var(--panel); padding: 14px 16px }
.tile b { display: block; font-size: 23px; line-height: 1.25; font-weight: 650 }
.tile span { display: block; font-size: 13px; color: var(--ink2) }
table { border-collapse: collapse; width: 100%; font-size: 14px; margin: 12px 0 4px }
th { text-align: right; font-weight: 600; color: var(--ink2); font-size: 13px; vertical-align: bottom }
th, td { padding: 8px 0 8px 12px; border-bottom: 1px solid var(--rule); text-align: right }
td { vertical-align: top }
th:nth-child(-n+5) { white-space: nowrap }
th:first-child, td:first-child { text-align: left; padding-left: 8px }
th:last-child, td:last-child { padding-right: 8px }
td:first-child { min-width: 130px }
td small { display: block; color: var(--ink2); font-size: 12px; white-space: nowrap }
td small.why { white-space: normal; font-weight: 400 }
td.verdict, th.verdict { text-align: left; width: 230px; padding-left: 20px }
td.verdict small { white-space: normal; overflow-wrap: anywhere }
@media (min-width: 760px) { .diagnosis td.verdict, .diagnosis th.verdict { width: 62% } }
summary { font-size: 14px; cursor: pointer; margin: 4px 0 }
.value { white-space: nowrap }
tr.chosen td { background: var(--accent-paper) }
tr.chosen td:first-child { font-weight: 650 }
.badge {
  display: inline-block; font-size: 12px; line-height: 1; font-weight: 600; padding: 4px 7px;
  border-radius: 5px; border: 1px solid var(--rule); color: var(--ink2); white-space: nowrap;
}
.badge.chosen { background: var(--accent); border-color: var(--accent); color: var(--paper) }
.key { display: inline-block; width: 10px; height: 10px; border-radius: 50%; background: var(--k);
  border: 2px solid var(--k); flex: none }
.keyed { display: flex; align-items: baseline; gap: 8px; overflow-wrap: anywhere }
.keyed span:last-child { min-width: 0 }
.key.again { background: transparent }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 13px; margin: 8px 0 0; padding: 0 }
.legend li { list-style: none }
figure { margin: 12px 0 0 }
figcaption { color: var(--ink2); font-size: 13.5px; max-width: 76ch; margin-top: 4px }
svg { display: block; width: 100%; height: auto }
.narrow { display: none }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 20px }
svg text { font-size: 12px; fill: var(--ink2) }
svg text.axis { font-weight: 600 }
svg text.name { fill: var(--ink); paint-order: stroke; stroke: var(--paper); stroke-width: 4px;
  stroke-linejoin: round }
svg text.strong { font-weight: 700 }
svg text.small { font-size: 10.5px }
svg .grid { stroke: var(--grid) }
svg .rule { stroke: var(--rule) }
svg .leader { stroke: var(--k, var(--ink2)); stroke-width: 1 }
svg .floor { stroke: var(--ink2); stroke-dasharray: 5 4 }
svg .front { stroke: var(--ink2); stroke-width: 1.5; fill: none; opacity: 0.65 }
svg .whisker { stroke: var(--k); stroke-width: 1.5; opacity: 0.55 }
svg .point { fill: var(--k); stroke: var(--k) }
svg .point.again { fill: var(--paper); stroke-width: 2 }
svg .ring { fill: none; stroke: var(--k); stroke-width: 1.5 }
svg .area { fill: var(--k); fill-opacity: 0.24; stroke: var(--k); stroke-width: 1.3; stroke-linejoin: round }
svg .mark { stroke: var(--k); stroke-width: 1.8 }
svg .curve { fill: none; stroke: var(--k); stroke-width: 1.8; stroke-linejoin: round }
svg .curve.again { stroke-dasharray: 6 3 }
svg .dots { fill: none; stroke: var(--k); stroke-width: 3; stroke-linecap: round; opacity: 0.8 }
svg .bar { fill: var(--bar) }
svg .band { fill: var(--panel) }
.exported { display: grid; grid-template-columns: 1fr 1fr; gap: 0 40px }
.exported div { min-width: 0 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 3px 20px; font-size: 14px; margin: 8px 0 }
dt { color: var(--ink2) }
dd { margin: 0; overflow-wrap: anywhere; min-width: 0 }
ul { margin: 4px 0; padding-left: 20px; font-size: 14px }
footer { margin-top: 56px; padding-top: 12px; border-top: 1px solid var(--rule) }
@media (max-width: 759px) {
  main { padding: 24px 20px 48px }
  h1 { font-size: 24px }
  .wide { display: none }
  .narrow { display: block; max-width: 480px; margin: 0 auto }
  .pair, .exported { grid-template-columns: 1fr }
  .tiles { grid-template-columns: 1fr 1fr }
  .tile:last-child:nth-child(odd) { grid-column: span 2 }
  thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%) }
  table, tbody, tr, td { display: block }
  tr { border: 1px solid var(--rule); border-radius: 8px; margin: 12px 0; overflow: hidden }
  td, td:first-child, td.verdict {
    display: grid; grid-template-columns: 116px minmax(52px, max-content) 1fr; gap: 0 10px; text-align: left;
    padding: 4px 12px; border: 0; width: auto; min-width: 0; align-items: baseline;
  }
  td::before { content: attr(data-label); color: var(--ink2); font-size: 13px }
  td.verdict small { grid-column: 2 / 4; padding: 3px 0 6px }
  td:first-child { display: block; background: var(--panel); padding: 8px 12px; font-weight: 650 }
  tr.chosen td:first-child { background: transparent }
  td:first-child::before { content: none }
  dl { grid-template-columns: 1fr; gap: 0 }
  dd { margin-bottom: 8px }
}
@media print { main { max-width: none } h2 { break-after: avoid } figure, tr { break-inside: avoid } }
"""
