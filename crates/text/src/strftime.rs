//! Dates for templates, `strftime_now("%d %B %Y")`, and for people.
//!
//! Times are UTC, because a server's own time zone is not the reader's and a prompt
//! should not depend on where it was rendered. No time zones, no locale.

/// Longest format string in bytes.
pub(crate) const FORMAT_BYTES_MAX: usize = 256;

/// The months of the year.
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
/// The days of the week, from Sunday.
const DAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];

/// Formats a time in UTC, `seconds` since 1970, like Python's `strftime`. An unknown directive
/// stays as it is; `%-d` and its kind drop leading zeros.
pub fn strftime(format: &str, seconds: i64) -> String {
    let (day, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let (year, month, day_of_month) = civil(day);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let day_of_year = day - days_before(year, 1, 1) + 1;
    let weekday = DAYS[(day + 4).rem_euclid(7) as usize]; // 1970-01-01 was a Thursday
    let month_name = MONTHS[month as usize - 1];
    let hour_12 = (hour + 11) % 12 + 1;

    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(ch) = chars.next() {
        if ch != '%' {
            out.push(ch);
            continue;
        }
        let rest = chars.as_str();
        let is_bare = rest.starts_with('-');
        if is_bare {
            chars.next();
        }
        let padded = |value: i64, width: usize| {
            if is_bare {
                value.to_string()
            } else {
                format!("{value:0width$}")
            }
        };
        let text = match chars.next() {
            Some('Y') => year.to_string(),
            Some('y') => padded(year.rem_euclid(100), 2),
            Some('m') => padded(month, 2),
            Some('d') => padded(day_of_month, 2),
            Some('e') => {
                if is_bare {
                    day_of_month.to_string()
                } else {
                    format!("{day_of_month:2}")
                }
            }
            Some('j') => padded(day_of_year, 3),
            Some('H') => padded(hour, 2),
            Some('I') => padded(hour_12, 2),
            Some('M') => padded(minute, 2),
            Some('S') => padded(second, 2),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('B') => month_name.to_owned(),
            Some('b' | 'h') => month_name[..3].to_owned(),
            Some('A') => weekday.to_owned(),
            Some('a') => weekday[..3].to_owned(),
            Some('F') => format!("{year}-{month:02}-{day_of_month:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => "UTC".to_owned(),
            Some('z') => "+0000".to_owned(),
            Some('%') => "%".to_owned(),
            Some(other) => format!("%{}{other}", if is_bare { "-" } else { "" }),
            None => format!("%{}", if is_bare { "-" } else { "" }),
        };
        out.push_str(&text);
    }
    out
}

/// Days from 1970-01-01 to the given date of the Gregorian calendar.
///
/// Years are counted from March, so that the leap day is the last of a year;
/// then month `m` (0 = March) starts after `(153·m + 2) / 5` days.
fn days_before(year: i64, month: i64, day: i64) -> i64 {
    let year = if month < 3 { year - 1 } else { year };
    let month = (month + 9) % 12;
    let leap_days = year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    365 * year + leap_days + (153 * month + 2) / 5 + day - 1 - 719_468
}

/// The date `day` days after 1970-01-01 as year, month and day of the month.
fn civil(day: i64) -> (i64, i64, i64) {
    // A guess that is never late, then a short way forward.
    let mut year = 1970 + day.div_euclid(366) - i64::from(day < 0);
    while days_before(year + 1, 1, 1) <= day {
        year += 1;
    }
    let mut month = 12;
    while days_before(year, month, 1) > day {
        month -= 1;
    }
    (year, month, day - days_before(year, month, 1) + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected strings are Python's, for `datetime.fromtimestamp(s, UTC)`.
    #[test]
    fn dates_are_pythons() {
        let format = "%Y-%m-%d %H:%M:%S %A %a %B %b %j %y %I %p";
        for (seconds, text) in [
            (
                0,
                "1970-01-01 00:00:00 Thursday Thu January Jan 001 70 12 AM",
            ),
            (
                951_782_400,
                "2000-02-29 00:00:00 Tuesday Tue February Feb 060 00 12 AM",
            ),
            (
                1_735_689_599,
                "2024-12-31 23:59:59 Tuesday Tue December Dec 366 24 11 PM",
            ),
            (
                4_107_542_400,
                "2100-03-01 00:00:00 Monday Mon March Mar 060 00 12 AM",
            ),
        ] {
            assert_eq!(strftime(format, seconds), text);
        }
        assert_eq!(strftime("%-d/%-m %e%%%q%", 0), "1/1  1%%q%");
    }

    #[test]
    fn every_day_of_four_centuries_has_its_own_date() {
        let mut last = civil(-1000);
        for day in -999..146_098 {
            let date = civil(day);
            assert!(date > last && date.1 <= 12 && date.2 <= 31);
            assert_eq!(days_before(date.0, date.1, date.2), day);
            last = date;
        }
    }
}
